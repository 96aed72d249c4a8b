"""Which rank of a benchmark's trainer or engine sits where, and on which device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.models import Config
from bench.parallelism import sizes
from weight_sync.errors import ConfigError
from weight_sync.sources.megatron_grid import ParallelGrid


@dataclass(frozen=True)
class TrainerGrid:
    """How trainer ranks share the weights: FSDP2, or a Megatron-style grid.

    Attributes:
        fsdp: Ranks of FSDP2; 1 for a plain module, or where another kind is given.
        tp: Tensor parallel ranks.
        pp: Pipeline stages.
        ep: Expert parallel ranks of one stage; they are the ranks that dense layers are tensor
            parallel over, or else replicated on.
    """

    fsdp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def megatron(self) -> bool:
        """Whether ranks hold what Megatron's layers hold, instead of one module."""
        return self.tp * self.pp * self.ep > 1

    @property
    def ranks(self) -> int:
        """All trainer ranks."""
        return self.fsdp * max(self.tp, self.ep) * self.pp

    def place(self, rank: int) -> ParallelGrid:
        """Where a rank of a Megatron-style grid is.

        Experts are cut as dense layers are unless they are spread over expert parallel ranks.
        """
        etp = self.tp if self.ep == 1 else 1
        dp = max(self.tp, self.ep) // self.tp
        return ParallelGrid.of_rank(rank, tp=self.tp, pp=self.pp, ep=self.ep, etp=etp, dp=dp)

    def stages(self) -> list[range]:
        """The ranks of each pipeline stage."""
        each = self.ranks // self.pp
        return [range(stage * each, (stage + 1) * each) for stage in range(self.pp)]

    def __str__(self) -> str:
        """The text it was read from."""
        parts = (("dp", self.fsdp), ("pp", self.pp), ("tp", self.tp), ("ep", self.ep))
        return ",".join(f"{kind}={size}" for kind, size in parts if size > 1) or "dp=1"


@dataclass(frozen=True)
class EngineGrid:
    """Engine shards.

    Attributes:
        tp: Workers of each shard, tensor parallel.
        dp: Shards.
        expert: Whether a shard's workers hold whole experts instead of slices of all.
    """

    tp: int = 1
    dp: int = 1
    expert: bool = False

    @property
    def workers(self) -> int:
        """All workers of all shards."""
        return self.tp * self.dp

    def __str__(self) -> str:
        """The text it was read from."""
        parts = [f"tp={self.tp}"]
        parts += [f"dp={self.dp}"] * (self.dp > 1) + [f"ep={self.tp}"] * self.expert
        return ",".join(parts)


def trainer_grid(text: str, cfg: Config) -> TrainerGrid:
    """Reads ``--trainer`` and checks it against the model.

    Args:
        text: ``dp=N`` for FSDP2, or ``pp``, ``tp`` and ``ep`` in any product.
        cfg: Configuration of the model.

    Raises:
        ConfigError: If it is not understood, or the model does not divide over it.
    """
    given = sizes(text, ("dp", "tp", "pp", "ep"))
    out = TrainerGrid(
        given.get("dp", 1), given.get("tp", 1), given.get("pp", 1), given.get("ep", 1)
    )
    if out.fsdp > 1 and out.megatron:
        raise ConfigError(
            f"--trainer {text}: dp is FSDP2 over all ranks and goes with no other kind; "
            "a Megatron-style trainer is a product of pp, tp and ep"
        )
    experts = _count(cfg, "num_experts")
    if out.ep > 1 and not experts:
        raise ConfigError(f"--trainer {text}: the model has no experts to spread over ep={out.ep}")
    if out.ep > 1 and out.ep % out.tp:
        raise ConfigError(
            f"--trainer {text}: a stage's {out.ep} expert parallel ranks must be a multiple of its "
            f"tp={out.tp} ranks"
        )
    inner = "moe_intermediate_size" if experts else "intermediate_size"
    _divides(text, cfg, ("num_hidden_layers",), "pp", out.pp)
    _divides(text, cfg, ("num_experts",), "ep", out.ep)
    _divides(text, cfg, ("num_key_value_heads", inner), "tp", out.tp)
    return out


def engine_grid(text: str, cfg: Config) -> EngineGrid:
    """Reads ``--engine`` and checks it against the model.

    Args:
        text: ``tp=N``, ``dp=M`` shards, and ``ep=N`` for whole experts on each of the N workers.
        cfg: Configuration of the model.

    Raises:
        ConfigError: If it is not understood, or the model does not divide over it.
    """
    given = sizes(text, ("tp", "dp", "ep"))
    tp = given.get("tp", given.get("ep", 1))
    if given.get("ep", tp) != tp:
        raise ConfigError(
            f"--engine {text}: ep={given['ep']} must equal tp={tp}, the workers of a shard"
        )
    expert = given.get("ep", 1) > 1
    if expert:
        if not _count(cfg, "num_experts"):
            raise ConfigError(f"--engine {text}: the model has no experts to spread over ep={tp}")
        _divides(text, cfg, ("num_experts",), "ep", tp)
    _divides(text, cfg, ("num_attention_heads",), "tp", tp)
    return EngineGrid(tp, given.get("dp", 1), expert)


def _count(cfg: Config, key: str) -> int:
    return int(cfg.get(key, 0))  # type: ignore[call-overload]


def _divides(text: str, cfg: Config, keys: Sequence[str], kind: str, parts: int) -> None:
    for key in keys:
        if _count(cfg, key) % parts:
            raise ConfigError(
                f"{text}: {key}={_count(cfg, key)} does not divide over {kind}={parts}"
            )


def engine_devices(engine: EngineGrid, device: str) -> tuple[str, ...]:
    """Device of each worker, shard by shard: the first GPUs."""
    if device == "cpu":
        return ("cpu",) * engine.workers
    return tuple(f"cuda:{number}" for number in range(engine.workers))


def trainer_devices(
    given: str | None, trainer: TrainerGrid, engine: EngineGrid, device: str, shared: bool
) -> tuple[str, ...]:
    """Device of each trainer rank.

    Args:
        given: ``--trainer-devices``, comma separated, or None.
        trainer: Trainer ranks.
        engine: Engine workers, which have the first GPUs.
        device: ``"cpu"`` or ``"cuda"``.
        shared: Whether ranks share the engine's GPUs unless told otherwise; else they have those
            after the engine's.

    Raises:
        ConfigError: If the number of devices is not that of ranks, or one of them is of the other
            kind.
    """
    if given is not None:
        out = tuple(part.strip() for part in given.split(","))
    elif device == "cpu":
        out = ("cpu",) * trainer.ranks
    else:
        first = 0 if shared else engine.workers
        out = tuple(f"cuda:{first + rank}" for rank in range(trainer.ranks))
    if len(out) != trainer.ranks:
        raise ConfigError(
            f"--trainer {trainer} has {trainer.ranks} ranks but --trainer-devices names {len(out)}"
        )
    known = "cpu" if device == "cpu" else "cuda:<number>"
    for name in out:
        kind, _, index = name.partition(":")
        if kind != device or (device == "cuda" and not index.isdecimal()):
            raise ConfigError(f"--trainer-devices: {name!r} is no device here, write {known}")
    return out


def check_devices(devices: Sequence[str], present: int) -> None:
    """Refuses GPUs that are not there, before anything starts.

    Args:
        devices: Everything that is to be used.
        present: Number of GPUs of the machine.

    Raises:
        ConfigError: Saying how many it takes.
    """
    needed = max((int(d.partition(":")[2]) + 1 for d in devices if d != "cpu"), default=0)
    if needed > present:
        raise ConfigError(
            f"this run needs {needed} GPUs, the machine has {present}; use a smaller --trainer or "
            "--engine, or let them share GPUs with --trainer-devices (ipc only)"
        )
