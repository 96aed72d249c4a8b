"""One per trainer rank: says what the rank holds, when it is ready, and lets engines read it."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext, suppress

import numpy as np
import torch

from weight_sync import env, threads
from weight_sync.arrays import pack
from weight_sync.comm.deadline import Deadline
from weight_sync.errors import (
    EngineStateError,
    PlanMismatchError,
    RefitError,
    StaleEpochError,
)
from weight_sync.failures import to_failure
from weight_sync.faults import FaultHook, no_fault
from weight_sync.identity import device_identity, host_identity
from weight_sync.kernels.base import CompiledDigest
from weight_sync.manifest import Manifest
from weight_sync.messages import (
    AbortGroups,
    AwaitVersion,
    Detach,
    Digests,
    Done,
    Exports,
    GetDigests,
    GetExports,
    GetManifest,
    GetReplicaDigests,
    GotManifest,
    Joined,
    JoinGroups,
    Message,
    Published,
    Quantize,
    Release,
    SendRounds,
    SetProgram,
    StageBucket,
    Staged,
    TrainerEndpointInfo,
    decode_trainer_request,
    encode,
)
from weight_sync.program import SenderProgram
from weight_sync.quantize.wanted import QuantSpec
from weight_sync.sources.base import WeightSource
from weight_sync.sources.quantized import ReduceMax
from weight_sync.trainer.export import Exporter, LocalRegions, collect
from weight_sync.trainer.hashing import compile_hash, compile_replica_hash
from weight_sync.trainer.publication import Publication
from weight_sync.trainer.ring import Ring
from weight_sync.trainer.sender import GroupSender
from weight_sync.trainer.served import Served
from weight_sync.trainer.waiting import at_once, waits
from weight_sync.wire.server import Server

# What errors call the work for a request.
_STAGES: dict[type, str] = {
    GetManifest: "plan",
    Quantize: "plan",
    SetProgram: "plan",
    GetExports: "connect",
    JoinGroups: "connect",
    AwaitVersion: "publish",
    StageBucket: "transfer",
    SendRounds: "transfer",
    GetDigests: "verify",
    GetReplicaDigests: "verify",
}


class TrainerEndpoint:
    """Serves one trainer rank's weights to refits.

    The trainer's own thread calls :meth:`publish` after each optimizer step and must not change
    weights until :meth:`wait` returned (or, where one controller drives everything, until
    ``sync_weights`` returned).

    Args:
        source: The rank's weights.
        rank: Trainer rank.
        engine_device: ``"cuda"`` if engines hold their weights on GPUs, else ``"cpu"``.
        host: Address to listen on for engines of other machines; None stays on this one.
        reduce_max: Replaces a vector by its maximum over all trainer ranks. Only for engines that
            want FP8 with one scale per matrix of matrices that ranks share; see
            :class:`~weight_sync.sources.quantized.QuantizedSource`. Called in :meth:`publish`, so
            ``init_communicator()`` comes before the first one.
        fault: For fault injection in tests.
    """

    def __init__(
        self,
        source: WeightSource,
        rank: int,
        *,
        engine_device: str = "cpu",
        host: str | None = None,
        reduce_max: ReduceMax | None = None,
        fault: FaultHook = no_fault,
    ) -> None:
        self.rank = rank
        self._fault = fault
        self._engine_device = engine_device
        self._device_index = torch.cuda.current_device() if engine_device == "cuda" else None
        device = device_identity(self._device_index)
        source.prepare()
        self._manifest = source.manifest(rank, host_identity(), device)
        self._served = Served(source, self._manifest, reduce_max, fault)
        self._exporter = Exporter()
        self._regions: LocalRegions | None = None
        self._fingerprint: object = None
        self._generation = 0
        self._program: SenderProgram | None = None
        self._epoch = -1
        self._hashes: dict[object, CompiledDigest] = {}
        self._digests: dict[tuple[int, int], Digests] = {}
        self._rings: dict[int, Ring] = {}
        self._sender: GroupSender | None = None
        self._publication = Publication(rank)
        self._event: torch.cuda.Event | None = None
        # Digests must not come before bytes that are packed meanwhile.
        cuda = engine_device == "cuda"
        self._digest_stream = torch.cuda.Stream(self._device_index) if cuda else None
        # What hashes holds only the first, so that bytes can be served meanwhile; whoever changes
        # what is hashed takes both, in this order.
        self._hashing = threading.RLock()
        self._work = threading.RLock()
        self._closed = False
        self._server = Server(self._serve, host=host, waits=waits, at_once=self._serve_at_once)
        self.info = TrainerEndpointInfo(rank, self._server.address, self._manifest.host, device)

    # --- the trainer's own thread ---------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Says that the weights are at ``version``; they must not change until released.

        Work already queued on the current CUDA stream is waited for before anyone reads.

        Raises:
            EngineStateError: If the endpoint is closed or the version does not grow.
        """
        if self._closed:
            raise EngineStateError(f"trainer {self.rank}: the endpoint is closed; make a new one")
        self._publication.check(version)
        with self._hashing, self._work:
            self._served.prepare()
            fingerprint = self._served.source.fingerprint()
            if self._regions is None or fingerprint != self._fingerprint:
                self._load_regions(fingerprint)
            if self._device_index is not None:
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(self._device_index))
            self._served.begin(version)
        self._publication.publish(version)

    def wait(self, version: int, seconds: float | None = None) -> None:
        """Waits until the refit of ``version`` ended.

        Raises:
            RefitError: If it failed; every rank gets the same reason.
            EngineStateError: If a newer version was published meanwhile.
            DeadlineError: If nobody ended it in time.
        """
        deadline = Deadline(env.deadline_seconds() if seconds is None else seconds)
        self._publication.wait_end(version, self._epoch, deadline)

    def forget(self) -> None:
        """Drops every reference to weight memory; call it before offloading or freeing weights."""
        with self._hashing, self._work:
            self._forget_regions()
            self._served.forget()

    def _forget_regions(self) -> None:
        self._regions = None
        self._fingerprint = None
        self._hashes.clear()
        self._exporter.forget()
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
        if self._sender is not None:
            self._sender.forget()

    def close(self) -> None:
        """Stops serving; safe twice."""
        if not self._closed:
            self._closed = True
            self._publication.close()
            self._leave_groups("the endpoint was closed")
            self._server.close()
            self.forget()

    def _load_regions(self, fingerprint: object) -> None:
        self._forget_regions()
        count = self._manifest.owner.shape[0]
        self._regions = collect([self._served.source.region(i) for i in range(count)])
        self._fingerprint = fingerprint
        self._generation += 1

    # --- serving threads ------------------------------------------------------------------------

    def _serve(self, raw: bytes) -> bytes:
        stage = "serve"
        try:
            request = decode_trainer_request(raw)
            stage = _STAGES.get(type(request), "control")
            if self._device_index is not None:
                torch.cuda.set_device(self._device_index)
            return encode(self._answer(request))
        except Exception as error:  # Everything that fails must reach the asking side.
            return encode(to_failure(error, stage))

    def _serve_at_once(self, raw: bytes) -> bytes | None:
        """On the thread that serves the socket, which neither lock nor device may hold up."""
        if not at_once(raw) or not self._work.acquire(blocking=False):
            return None
        try:
            request = decode_trainer_request(raw)
            with self._on_device():
                if isinstance(request, AwaitVersion) and not self._is_ready(request.version):
                    return None
                return encode(self._answer(request))
        except Exception as error:  # Everything that fails must reach the asking side.
            return encode(to_failure(error, "publish"))
        finally:
            self._work.release()

    def _on_device(self) -> AbstractContextManager[object]:
        """The rank's device is the current one, for threads that others use as well."""
        index = self._device_index
        return nullcontext() if index is None else torch.cuda.device(index)

    def _is_ready(self, version: int) -> bool:
        """Whether a version can be read without waiting for anything; needs the lock."""
        return (
            self._served.quantized is None
            and self._publication.is_at(version)
            and (self._event is None or self._event.query())
        )

    def _answer(self, request: Message) -> Message:
        match request:
            case GetManifest(plain):
                return self._got(self._served.plain_manifest if plain else self._manifest)
            case Quantize(wanted, epoch):
                return self._quantize(wanted, epoch)
            case SetProgram(program):
                self._fault("plan")
                self._set_program(program)
                return Done()
            case AwaitVersion(version, epoch, seconds, verify):
                reply = self._await_version(version, epoch, Deadline(seconds))
                if verify:
                    self._hash_ahead(version)
                return reply
            case GetExports(epoch, digest):
                return self._exports(epoch, digest)
            case GetDigests(epoch, digest, version, class_id):
                return self._class_digests(epoch, digest, version, class_id)
            case GetReplicaDigests(version):
                return self._replica_digests(version)
            case StageBucket(epoch, digest, version, worker, bucket):
                return self._stage(epoch, digest, version, worker, bucket)
            case JoinGroups():
                return self._join(request)
            case SendRounds():
                return self._send(request)
            case AbortGroups(epoch, reason):
                sender = self._sender
                if sender is not None and sender.epoch == epoch:
                    sender.abort(reason)
                return Done()
            case Detach(epoch, reason):
                if epoch >= self._epoch:
                    self._leave_groups(reason)
                return Done()
            case Release(version, epoch, error):
                # One of a controller that was replaced may come late.
                if epoch >= self._epoch:
                    self._publication.end(version, epoch, error)
                return Done()
            case _:
                raise PlanMismatchError(f"trainer {self.rank} does not know {type(request)}")

    def _require_later(self, epoch: int) -> None:
        if epoch <= self._epoch:
            raise StaleEpochError(
                f"trainer {self.rank} holds a plan of epoch {self._epoch}; epoch {epoch} is "
                "over. Whoever sent it was replaced, and must build a new epoch to go on."
            )

    def _set_program(self, program: SenderProgram) -> None:
        # One lock for all of it: a process that was stopped may go on with an older plan here.
        with self._hashing, self._work:
            self._require_later(program.epoch)
            self._leave_groups("a new plan came")
            self._epoch = program.epoch
            self._publication.overtake(program.epoch)
            self._program = program
            self._hashes.clear()
            self._digests.clear()
            for ring in self._rings.values():
                ring.close()
            self._rings.clear()

    def _quantize(self, wanted: tuple[QuantSpec, ...], epoch: int) -> GotManifest:
        with self._hashing, self._work:
            self._require_later(epoch)
            if self._served.want(wanted):
                self._manifest = self._served.manifest
                self._program = None
                self._digests.clear()
                self._forget_regions()
            return self._got(self._manifest)

    def _got(self, manifest: Manifest) -> GotManifest:
        return GotManifest(manifest, self._epoch)

    def _await_version(self, version: int, epoch: int, deadline: Deadline) -> Published:
        self._publication.wait_for(version, epoch, deadline)
        if self._event is not None:
            self._event.synchronize()
        with self._work:
            self._served.start(version)
            # Through groups, nothing live changes before all was sent; who sends waits by itself.
            if self._sender is None:
                self._served.ensure(version, deadline.remaining())
        return Published(version, self._generation)

    def _checked(self, epoch: int, digest: str) -> SenderProgram:
        program = self._program
        if epoch < self._epoch:
            raise StaleEpochError(
                f"trainer {self.rank} holds a plan of epoch {self._epoch}; epoch {epoch} is over. "
                "Nothing was sent."
            )
        if program is None or (program.epoch, program.plan_digest) != (epoch, digest):
            have = "no plan" if program is None else f"epoch {program.epoch}, {program.plan_digest}"
            raise PlanMismatchError(
                f"trainer {self.rank} holds {have}, but was asked for epoch {epoch}, {digest}. "
                "Nothing was sent; call init_communicator() again."
            )
        return program

    def _local(self, version: int | None = None) -> LocalRegions:
        published = self._publication.version
        if version is not None and version != published:
            raise RefitError(
                f"trainer {self.rank} was asked for version {version} but is at {published}",
                stage="transfer",
                version=version,
            )
        if version is not None:
            self._served.start(version)
        if self._regions is None:
            self._load_regions(self._served.source.fingerprint())
        assert self._regions is not None
        return self._regions

    def _exports(self, epoch: int, digest: str) -> Exports:
        self._checked(epoch, digest)
        self._fault("connect")
        with self._hashing, self._work:
            return self._export(self._local())

    def _export(self, regions: LocalRegions) -> Exports:
        """Exports regions; host memory moves when it becomes shared memory."""
        self._served.settle(env.deadline_seconds())
        before = [storage.data_ptr() for storage in regions.storages]
        cuda = self._engine_device == "cuda"
        exports = self._exporter.export(regions, self._generation, accelerator=cuda)
        if before != [storage.data_ptr() for storage in regions.storages]:
            self._hashes.clear()
        return exports

    def _class_digests(self, epoch: int, digest: str, version: int, class_id: int) -> Digests:
        self._fault("verify")
        with self._hashing:
            program = self._checked(epoch, digest)
            return self._digest_of(program, version, class_id)

    def _digest_of(self, program: SenderProgram, version: int, class_id: int) -> Digests:
        key = (version, class_id)
        if key not in self._digests:
            task = next((t for t in program.hashes if t.class_id == class_id), None)
            if task is None:
                return Digests(pack(np.zeros(0, np.uint64)))
            with self._work:
                regions = self._local(version)
                if class_id not in self._hashes:
                    self._hashes[class_id] = compile_hash(self._manifest, regions, task)
                work = self._hashes[class_id]
            self._served.ensure(version, env.deadline_seconds())
            self._digests = {k: d for k, d in self._digests.items() if k[0] == version}
            side = self._digest_stream
            with nullcontext() if side is None else torch.cuda.stream(side):
                self._digests[key] = Digests(pack(work.run()))
        return self._digests[key]

    def _hash_ahead(self, version: int) -> None:
        """Begins the digests of a version before workers ask for them."""

        def run() -> None:
            # A worker that asks for them gets the error.
            with suppress(Exception), self._on_device(), self._hashing:
                program = self._program
                if program is None:
                    return
                for task in program.hashes:
                    # A refit that ended meanwhile lets the trainer change its weights.
                    if self._closed or not self._publication.is_at(version):
                        return
                    self._digest_of(program, version, task.class_id)

        threads.start("weight-sync-hash", run)

    def _replica_digests(self, version: int) -> Digests:
        with self._hashing:
            with self._work:
                work = compile_replica_hash(self._manifest, self._local(version))
            self._served.ensure(version, env.deadline_seconds())
            return Digests(pack(work.run()))

    # --- groups ---------------------------------------------------------------------------------

    def _join(self, request: JoinGroups) -> Joined:
        program = self._checked(request.epoch, request.plan_digest)
        self._leave_groups("groups are built again")
        device = torch.device(self._engine_device, self._device_index or 0)
        sender = GroupSender(self.rank, self._manifest, program, request, device, self._fault)
        try:
            with self._work:
                self._checked(request.epoch, request.plan_digest)
                sender.prepare(self._local(), self._generation)
                self._served.arrange(sender.order())
                self._sender = sender
        except BaseException as error:
            sender.abort(f"trainer {self.rank} failed: {error}")
            sender.close()
            raise
        return Joined(sender.cuts)

    def _send(self, request: SendRounds) -> Done:
        # A late request of a controller that was replaced must not end its successor's groups.
        self._checked(request.epoch, request.plan_digest)
        sender = self._sender
        if sender is None or sender.epoch != request.epoch:
            raise EngineStateError(
                f"trainer {self.rank} is in no group; call init_communicator() again"
            )
        try:
            with self._work:
                sender.prepare(self._local(request.version), self._generation)
                quantized = self._served.quantized
            rounds, deadline = range(request.first, request.last), Deadline(request.seconds)
            sender.send(rounds, request.version, deadline, quantized)
        except BaseException as error:
            # Whatever went wrong here, the others must not wait for bytes of this rank.
            sender.abort(f"trainer {self.rank} failed: {error}")
            raise
        return Done()

    def _leave_groups(self, reason: str) -> None:
        sender = self._sender
        self._sender = None
        if sender is not None:
            sender.abort(reason)
            sender.close()

    def _stage(self, epoch: int, digest: str, version: int, worker: int, bucket: int) -> Staged:
        program = self._checked(epoch, digest)
        self._fault("transfer", bucket * program.bucket_bytes)
        if worker not in self._rings:
            with self._hashing, self._work:
                self._make_ring(program, worker, self._local(version))
        with self._work:
            self._served.ensure(version, env.deadline_seconds())
            ring, regions = self._rings[worker], self._local(version)
            return ring.stage(version, bucket, regions, self._generation)

    def _make_ring(self, program: SenderProgram, worker: int, regions: LocalRegions) -> None:
        task = next(t for t in program.sends if t.worker == worker)
        place = self._export(regions).storage.unpack()[task.region.unpack()]
        device = torch.device(self._engine_device, self._device_index or 0)
        missing = np.flatnonzero(place < 0)
        self._rings[worker] = Ring(task, missing, self._manifest, program.bucket_bytes, device)
