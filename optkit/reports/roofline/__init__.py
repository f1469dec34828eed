"""What a device allows a model at most: its bytes and operations against the device's rates."""

from optkit.devices.datasheets import DEVICES, Device, datasheet, rates_text
from optkit.devices.kept_roofs import measured_device, roof_generation
from optkit.reports.roofline.forms import parse_form
from optkit.reports.roofline.limits import Limit, session_limits
from optkit.reports.roofline.models import work_of_model
from optkit.reports.roofline.plot import to_svg
from optkit.reports.roofline.report import FormLimits, RooflineReport, build_report
from optkit.reports.roofline.work import work_of
