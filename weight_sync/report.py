"""What one refit did: stages, bytes, rates, modes; the same schema for every transport."""

from __future__ import annotations

import msgspec

STAGES = (
    "plan",
    "publish",
    "stage",
    "pause",
    "export",
    "transfer",
    "commit",
    "process",
    "verify",
    "invalidate",
    "resume",
    "release",
)


class RefitReport(msgspec.Struct, frozen=True):
    """One refit.

    Attributes:
        version: Committed weight version.
        epoch: Membership epoch.
        transport: Name of the transport.
        tensors: Checkpoint tensors that reached at least one worker.
        bytes: Bytes written into all workers.
        seconds: Seconds per stage, the slowest worker's where workers differ. Transports that stage
            spend transfer before the pause, and commit, the local copy, under it.
        total_seconds: From the call to its return.
        pause_seconds: How long generation stood still.
        modes: Units per install mode on the first worker.
        verified: Whether every worker compared every digest.
        workers: Workers that committed.
        absent: Shards that did not take part, or were lost on the way.
        retried: Why a second attempt was needed; empty if the first succeeded.
    """

    version: int
    epoch: int
    transport: str
    tensors: int
    bytes: int
    seconds: dict[str, float]
    total_seconds: float
    pause_seconds: float
    modes: dict[str, int]
    verified: bool
    workers: int
    absent: tuple[int, ...] = ()
    retried: str = ""

    @property
    def gbps(self) -> float:
        """Payload rate of the transfer stage in GB/s (1e9 bytes), all workers together."""
        return self.bytes / 1e9 / max(self.seconds.get("transfer", 0.0), 1e-9)

    @property
    def overhead_seconds(self) -> float:
        """Everything but transfer, commit, process and verify."""
        work = sum(self.seconds.get(s, 0.0) for s in ("transfer", "commit", "process", "verify"))
        return self.total_seconds - work

    def line(self) -> str:
        """One line for a log."""
        stages = " ".join(
            f"{name}={self.seconds[name] * 1e3:.1f}" for name in STAGES if name in self.seconds
        )
        return (
            f"v{self.version} {self.transport} {self.bytes / 1e6:.1f} MB in "
            f"{self.total_seconds * 1e3:.1f} ms (ms: {stages}) verified={self.verified}"
        )

    def prometheus(self) -> str:
        """The report in Prometheus text exposition format."""
        label = f'transport="{self.transport}"'
        lines = [
            "# TYPE weight_sync_version gauge",
            f"weight_sync_version{{{label}}} {self.version}",
            "# TYPE weight_sync_bytes gauge",
            f"weight_sync_bytes{{{label}}} {self.bytes}",
            "# TYPE weight_sync_pause_seconds gauge",
            f"weight_sync_pause_seconds{{{label}}} {self.pause_seconds}",
            "# TYPE weight_sync_stage_seconds gauge",
        ]
        lines += [
            f'weight_sync_stage_seconds{{{label},stage="{stage}"}} {seconds}'
            for stage, seconds in self.seconds.items()
        ]
        return "\n".join(lines) + "\n"

    def chrome_trace(self) -> list[dict[str, object]]:
        """Events for a Chrome trace viewer; stages one after the other."""
        at, events = 0.0, []
        for stage in STAGES:
            if stage in self.seconds:
                length = self.seconds[stage] * 1e6
                events.append(
                    {"name": stage, "ph": "X", "ts": at, "dur": length, "pid": 0, "tid": 0}
                )
                at += length
        return events
