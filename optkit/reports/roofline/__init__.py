"""What a device allows a model at most: its bytes and operations against the device's rates."""

from optkit.devices.datasheets import DEVICES, Device, datasheet, rates_text
from optkit.devices.kept_roofs import measured_device, roof_generation
from optkit.reports.roofline.forms import parse_form
from optkit.reports.roofline.limits import Limit, decode_limit, prefill_limit
from optkit.reports.roofline.models import work_of_model
from optkit.reports.roofline.plot import to_svg
from optkit.reports.roofline.report import DEFAULT_BATCHES, FormLimits, RooflineReport, build_report
from optkit.reports.roofline.sessions import session_limits
from optkit.reports.roofline.work import Work, work_of

__all__ = [
    "DEFAULT_BATCHES",
    "DEVICES",
    "Device",
    "FormLimits",
    "Limit",
    "RooflineReport",
    "Work",
    "build_report",
    "datasheet",
    "decode_limit",
    "measured_device",
    "parse_form",
    "prefill_limit",
    "rates_text",
    "roof_generation",
    "session_limits",
    "to_svg",
    "work_of",
    "work_of_model",
]
