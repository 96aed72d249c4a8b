"""weight_sync: trained weights into every running vLLM worker, verified, after each step."""

from weight_sync.errors import WeightSyncError
from weight_sync.report import RefitReport

__all__ = ["RefitReport", "WeightSyncError"]
