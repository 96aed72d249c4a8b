"""The refit side of the facade: one name per transport, all over the same synchronizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

from ray.actor import ActorHandle

from generation.answers import values_or_raise
from generation.errors import FleetStateError, GenerationConfigError
from generation.fleet_base import FleetBase
from weight_sync.errors import MembershipError
from weight_sync.membership import Membership
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.report import RefitReport

logger = logging.getLogger("generation.vllm_generation")


class RefitCalls(FleetBase):
    """Refits and membership of the facade.

    The futures are :class:`concurrent.futures.Future`: wait for them together with the trainer's
    own work. One refit is one operation over all participants, so each list holds one future.
    """

    _address_warned = False

    def prepare_refit_info(
        self,
        state_dict_info: Sequence[TrainerEndpointInfo] | None,
        *,
        not_trained: Sequence[str] = (),
    ) -> list[str] | None:
        """Takes the trainer ranks to refit from: their endpoints, not a state dict.

        Names, shapes and dtypes are not passed here: every rank's endpoint states them, and they
        are compared with what the engines' own loaders read before the first byte moves.

        Args:
            state_dict_info: Where the trainer ranks answer: ``TrainerEndpoint.info`` of every rank,
                in rank order. Only its name is the older API's, whose mapping of names to shapes is
                not taken. None does nothing.
            not_trained: Names or ``prefix*``: trainer tensors the engine may ignore, engine
                parameters that keep their values.

        Returns:
            None: the engines take all tensors as the trainer holds them.

        Raises:
            EngineStateError: A refit is running.
        """
        if state_dict_info is not None:
            self.refits.offer(state_dict_info, not_trained)
        return None

    def init_ipc_zmq(self) -> list[Future[Membership]]:
        """Plans and connects the ipc transport, so that the first refit takes no longer than later
        ones. Optional: a refit builds what it needs.

        Returns:
            One future of the membership that was built.

        Raises:
            FleetStateError: No workers, or no trainers were offered.
            ConfigError: The transport cannot work here.
            EngineStateError: A refit is running.
        """
        self._require_workers()
        return [self.refits.connect("ipc")]

    def update_weights_via_ipc_zmq(
        self, *, version: int | None = None, refit_timeout_s: float | None = None
    ) -> list[Future[RefitReport]]:
        """Refits over shared device memory; trainers and engines are on one host.

        Args:
            version: What the trainers publish; None for one more than the last.
            refit_timeout_s: Deadline of the refit, seconds.

        Returns:
            One future. Its report stands for an explicit answer of every worker of every
            participant; otherwise it holds the error.

        Raises:
            FleetStateError: No workers, or no trainers were offered.
            ConfigError: The transport cannot work here.
            EngineStateError: A refit is running.
        """
        return self._refit("ipc", version, refit_timeout_s)

    def update_weights_from_collective(
        self, refit_timeout_s: float | None = None, *, version: int | None = None
    ) -> list[Future[RefitReport]]:
        """Refits over the broadcast transport; as :meth:`update_weights_via_ipc_zmq`."""
        return self._refit("broadcast", version, refit_timeout_s)

    def nccl_reshard_refit(
        self, refit_timeout_s: float | None = None, *, version: int | None = None
    ) -> list[Future[RefitReport]]:
        """Refits over the reshard transport; as :meth:`update_weights_via_ipc_zmq`."""
        return self._refit("reshard", version, refit_timeout_s)

    def _refit(
        self, transport: str, version: int | None, timeout_s: float | None
    ) -> list[Future[RefitReport]]:
        self._require_workers()
        limit = self.limits.refit_s if timeout_s is None else timeout_s
        return [self.refits.refit(transport, version, limit)]

    # --- groups ---------------------------------------------------------------------------------

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int
    ) -> list[Future[Membership]]:
        """Plans and connects the broadcast transport.

        Args:
            ip: Not used, and a warning says so once; kept for callers of the older API. Groups meet
                at an address of the plan, fresh for every epoch.
            port: As ``ip``.
            world_size: Trainer ranks plus the engine workers that take part.
            train_world_size: Trainer ranks.

        Returns:
            One future of the membership that was built.

        Raises:
            FleetStateError: No workers, or no trainers were offered.
            GenerationConfigError: The sizes are not those of trainers and fleet.
            ConfigError: The transport cannot work here.
        """
        self._require_workers()
        self._warn_of_address(ip, port)
        self._check_world(world_size, train_world_size)
        return [self.refits.connect("broadcast")]

    def init_nccl_reshard_comm_group(
        self,
        pp_ips: Sequence[str],
        pp_ports: Sequence[int],
        pp_size: int,
        train_ranks_per_stage: int,
        sub_world_size: int,
    ) -> list[Future[Membership]]:
        """Plans and connects the reshard transport, one group per trainer pipeline stage.

        Args:
            pp_ips: Not used, as ``ip`` of :meth:`init_collective`.
            pp_ports: As ``pp_ips``.
            pp_size: Pipeline stages of the trainer; 1 without pipeline parallelism.
            train_ranks_per_stage: Trainer ranks of one stage.
            sub_world_size: Ranks of one group: one stage's trainers plus the engine workers.

        Returns:
            One future of the membership that was built.

        Raises:
            FleetStateError: No workers, or no trainers were offered.
            GenerationConfigError: The sizes are not those of trainers and fleet.
            ConfigError: The transport cannot work here.
        """
        self._require_workers()
        self._warn_of_address(list(pp_ips), list(pp_ports))
        others = train_ranks_per_stage * (pp_size - 1)
        self._check_world(sub_world_size + others, train_ranks_per_stage * pp_size)
        return [self.refits.connect("reshard")]

    def prepare_nccl_reshard_refit_info(
        self,
        refit_info: Sequence[TrainerEndpointInfo] | None,
        *,
        not_trained: Sequence[str] = (),
    ) -> None:
        """Takes the trainer ranks for the reshard transport, as :meth:`prepare_refit_info`."""
        self.prepare_refit_info(refit_info, not_trained=not_trained)

    def _warn_of_address(self, ip: str | list[str], port: int | list[int]) -> None:
        if (ip or port) and not self._address_warned:
            self._address_warned = True
            logger.warning(
                "ip %s and port %s are not used: groups meet at an address that the plan gives "
                "every epoch; leave them empty",
                ip,
                port,
            )

    def _check_world(self, world_size: int, train_world_size: int) -> None:
        trainers = len(self.refits.trainers)
        if not trainers:
            raise FleetStateError(
                "no trainers to refit from; pass their endpoints to prepare_refit_info() first"
            )
        workers = len(self.roster.participants()) * self.pool.shard_width
        wrong = []
        if train_world_size != trainers:
            wrong.append(f"train_world_size={train_world_size}, but {trainers} ranks were offered")
        if world_size != train_world_size + workers:
            wrong.append(
                f"world_size={world_size}, but {train_world_size} trainer ranks and {workers} "
                f"engine workers are {train_world_size + workers}"
            )
        if wrong:
            raise GenerationConfigError("refit groups", wrong)

    # --- membership -----------------------------------------------------------------------------

    def set_refit_membership(self, membership: Membership) -> None:
        """Limits all later refits to the shards of ``membership``.

        Raises:
            MembershipError: It names shards that do not exist, or another shard width.
        """
        unknown = sorted(set(membership.shards) - set(self.pool.shards))
        if unknown or membership.workers_per_shard != self.pool.shard_width:
            raise MembershipError(
                f"membership has shards {list(membership.shards)} of "
                f"{membership.workers_per_shard} workers; the fleet has {list(self.pool.shards)} "
                f"of {self.pool.shard_width}"
            )
        self.roster.set_membership(membership)

    def rebuild_collective(
        self, membership: Membership, ip: str, port: int
    ) -> list[Future[Membership]]:
        """Plans and connects the broadcast transport again, for the shards of a membership.

        ``ip`` and ``port`` are not used, as in :meth:`init_collective`.
        """
        self._require_workers()
        self._warn_of_address(ip, port)
        self.set_refit_membership(membership)
        self._check_world(membership.world_size, membership.trainer_world_size)
        return [self.refits.connect("broadcast")]

    def rebuild_nccl_reshard_comm_group(
        self,
        membership: Membership,
        pp_ips: Sequence[str],
        pp_ports: Sequence[int],
        pp_size: int,
        train_ranks_per_stage: int,
        sub_world_size: int,
    ) -> list[Future[Membership]]:
        """Plans and connects the reshard transport again, for the shards of a membership.

        ``pp_ips`` and ``pp_ports`` are not used, as in :meth:`init_collective`.
        """
        self._require_workers()
        self.set_refit_membership(membership)
        return self.init_nccl_reshard_comm_group(
            pp_ips, pp_ports, pp_size, train_ranks_per_stage, sub_world_size
        )

    def _refit_leaders_by_shard(self) -> list[tuple[int, int, ActorHandle]]:
        """Returns (shard, index of its leader among all workers, leader) in refit-rank order.

        Raises:
            FleetStateError: No workers.
        """
        self._require_workers()
        return [
            (shard, self.pool.leader_index(shard), self.pool.leader(shard))
            for shard in self.roster.participants()
        ]

    def _refit_leader_workers(self) -> list[ActorHandle]:
        """Returns the leaders that take part in refits, in rank order."""
        return [leader for _, _, leader in self._refit_leaders_by_shard()]

    def _report_device_id(self) -> list[list[str]]:
        """Returns the device of every worker of every living shard, in rank order."""
        answers = self.pool.ask(
            self.roster.alive(), "report_device_id", timeout_s=self.limits.call_s
        )
        found = values_or_raise(answers)
        return [found[shard] for shard in sorted(found)]

    @property
    def requires_kv_scale_sync(self) -> bool:
        """True only for per-tensor FP8 KV caches, the ones with ``k_scale`` and ``v_scale``."""
        return self.config.requires_kv_scale_sync
