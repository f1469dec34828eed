"""Where the time of a model goes: a trace of prefill and decode, by kind, and what to try."""

from optkit.reports.profiling.profile_report import KINDS, Line, Phase, ProfileReport
from optkit.reports.profiling.run import profile_model
