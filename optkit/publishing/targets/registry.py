"""The places that `optkit push` knows.
It is a dict of strings, so that listing imports nothing.

A plug-in package adds its own with an entry point of the group `optkit.targets`.
"""

from __future__ import annotations

import re
from pkgutil import resolve_name

from optkit.common.plug_ins import with_plug_ins
from optkit.errors import UsageError, did_you_mean
from optkit.publishing.targets.base import Target

TARGETS = {
    "hf": "optkit.publishing.targets.hub:Hub",
    "mlflow": "optkit.publishing.targets.mlflow:Mlflow",
    "oci": "optkit.publishing.targets.oci:Oci",
}
"""Scheme -> `module:Class` of an `optkit.publishing.targets.base.Target`."""
PASSWORD = re.compile(r"[^/]*@")
"""What stands before the first slash of an address with a user in it."""


def target_of(address: str) -> Target:
    """Return the target that an address names. Raises UsageError if it names none."""
    known = with_plug_ins("target", TARGETS)
    scheme, separator, rest = address.partition("://")
    if not separator:
        raise UsageError(
            f"'{address}' is no address of a target", remedy=f"Write it as SCHEME://PLACE; schemes: {', '.join(known)}"
        )
    if scheme not in known:
        raise UsageError(f"there is no target '{scheme}'.{did_you_mean(scheme, known)}", where=f"{scheme}://")
    if PASSWORD.match(rest):
        raise UsageError(
            "the address has a user or a password before its @",
            where=f"{scheme}://",
            why="Addresses are printed and logged",
            remedy="Leave it out: secrets come from the environment",
        )
    found: Target = resolve_name(known[scheme].target)(rest)
    return found
