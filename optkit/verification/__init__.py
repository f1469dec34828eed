"""Proof that an artifact is what it says and that other programs open it.
It has static checks, engines in processes of their own, and the record.
"""

from optkit.scorecard.loading import EngineName
from optkit.verification.check_result import Check
from optkit.verification.engines import ENGINE_NAMES
from optkit.verification.result_file import keep_loading, read_loading
from optkit.verification.verify import Verified, verify_artifact

__all__ = ["ENGINE_NAMES", "Check", "EngineName", "Verified", "keep_loading", "read_loading", "verify_artifact"]
