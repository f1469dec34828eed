"""An artifact made again from its own record: the same bytes, or what differs and since which step."""

from optkit.reports.reproduction.reproduce import Reproduction, reproduce
