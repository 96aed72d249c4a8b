"""One trainer rank of the demo: a process that holds its FSDP2 shard and obeys commands.

The optimizer keeps fp32 master weights. The model holds them rounded to bf16, in fp32 storage: it
computes with exactly the values that the engine serves, so the cast to bf16 on their way loses
nothing. (Were the model to hold the masters, most of a step would be below bf16 resolution: after
one step at this learning rate 99.7 % of the masters differ from their start and 1.7 % of their bf16
roundings do, and the two policies drift apart.) Arithmetic stays in fp32, which CPUs without bf16
instructions do several times faster.

Started by ``trainers.Trainers``, with ``RANK WORLD STORE CHECKPOINT FD DEVICE`` as arguments.
"""

from __future__ import annotations

import shutil
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import grpo
from commands import COMMANDS, ENCODER, Command, Done, Failed, Publish, Save, Score, Step, Stop
from weight_sync.sources.module import ModuleSource
from weight_sync.trainer.endpoint import TrainerEndpoint

LEARNING_RATE = 2e-5
MAX_GRAD_NORM = 1.0
COLLECTIVE_DEADLINE = timedelta(seconds=120)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Trainer:
    """The sharded model and its optimizer on this rank, and the endpoint that lets engines read it.

    Args:
        checkpoint: Directory with the starting weights and the tokenizer.
        device: ``"cpu"`` or ``"cuda"``, of the trainers and of the engines.
    """

    def __init__(self, checkpoint: Path, device: str) -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(f"cuda:{dist.get_rank()}" if device == "cuda" else "cpu")
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.model = model.to(self.device)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        # Kept whole between forward and backward: one all-gather of each layer a step, not two.
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)
        self.masters = [_local(p).detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
        )
        source = ModuleSource(self.model, cast={"*": "bfloat16"})
        self.endpoint = TrainerEndpoint(source, dist.get_rank(), engine_device=device)

    def step(self, command: Step) -> Done:
        """Takes one optimizer step; returns this rank's share of the loss."""
        data = grpo.batch(command.samples, self.model.config.pad_token_id, self.device)
        logprobs = grpo.token_logprobs(self.model, data)
        loss = grpo.policy_loss(logprobs, data, tokens=command.tokens)
        # FSDP averages gradients over ranks; the loss is already divided by the whole batch.
        (loss * dist.get_world_size()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self._update()
        return Done(loss=loss.item())

    def close(self) -> None:
        """Stops serving weights."""
        self.endpoint.close()

    @torch.no_grad()
    def _update(self) -> None:
        """Steps the masters with the model's gradients and rounds them into the model."""
        pairs = list(zip(self.masters, self.model.parameters(), strict=True))
        for master, parameter in pairs:
            master.grad = None if parameter.grad is None else _local(parameter.grad)
        self.optimizer.step()
        for master, parameter in pairs:
            _local(parameter).copy_(master.to(torch.bfloat16))
            master.grad = parameter.grad = None

    @torch.no_grad()
    def score(self, command: Score) -> Done:
        """Log-probabilities of given completions with the weights as they are."""
        data = grpo.batch(command.samples, self.model.config.pad_token_id, self.device)
        logprobs = grpo.token_logprobs(self.model, data)
        # Without a backward pass nothing else would free the gathered layers.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return Done(
            logprobs=[
                row[: len(s.completion)].tolist()
                for row, s in zip(logprobs, command.samples, strict=True)
            ]
        )

    @torch.no_grad()
    def save(self, command: Save) -> Done:
        """Writes the whole model in bf16, loadable by vLLM like any other checkpoint."""
        # A tied head is one parameter under one name here, which is also how checkpoints store it.
        weights = {}
        for name, parameter in self.model.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if dist.get_rank() == 0:
                weights[name] = whole.to(torch.bfloat16).contiguous().cpu()
        if dist.get_rank() == 0:
            ignored = shutil.ignore_patterns("*.safetensors")
            shutil.copytree(self.checkpoint, command.path, ignore=ignored)
            save_file(weights, Path(command.path) / "model.safetensors", metadata={"format": "pt"})
        return Done()

    def handle(self, command: Command) -> Done:
        """Carries out one command."""
        match command:
            case Step():
                return self.step(command)
            case Score():
                return self.score(command)
            case Publish(version):
                self.endpoint.publish(version)
                return Done()
            case Save():
                return self.save(command)
            case Stop():
                return Done()


def serve(
    connection: Connection, rank: int, world: int, store: str, checkpoint: Path, device: str
) -> None:
    """Joins the group, says so, then answers commands until ``Stop`` or a failure.

    A failure is reported and ends the process: its peers may be waiting in a collective that this
    rank left, so no further command could be trusted.
    """
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=COLLECTIVE_DEADLINE,
        )
        trainer = Trainer(checkpoint, device)
        connection.send_bytes(ENCODER.encode(Done(endpoint=trainer.endpoint.info)))
        command: Command | None = None
        while not isinstance(command, Stop):
            command = COMMANDS.decode(connection.recv_bytes())
            connection.send_bytes(ENCODER.encode(trainer.handle(command)))
        trainer.close()
        dist.destroy_process_group()
    except EOFError:
        return  # The main process is gone.
    except Exception:
        connection.send_bytes(ENCODER.encode(Failed(traceback.format_exc())))
        sys.exit(1)


if __name__ == "__main__":
    _rank, _world, _store, _checkpoint, _fd, _device = sys.argv[1:]
    serve(Connection(int(_fd)), int(_rank), int(_world), _store, Path(_checkpoint), _device)
