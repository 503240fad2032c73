"""Pack plans into addresses, and check them when they are read.

The text is the plan file, deflated and in URL-safe base64: about 300 characters for a model of 80
blocks. The length of a text from an address is limited, packed and unpacked. It is read like any
plan file. It contains names of modules, never of files.
"""

import base64
import binascii
import zlib

from fsdp_inspect.errors import PlanError
from fsdp_inspect.result_types import Plan

_LONGEST_ADDRESS = 6_000
_LONGEST_PLAN = 500_000


def pack_plan(plan: Plan) -> str | None:
    """Pack a plan for an address; None if it is too long."""
    packed = base64.urlsafe_b64encode(zlib.compress(plan.to_toml().encode(), 9)).decode()
    text = packed.rstrip("=")
    return text if len(text) <= _LONGEST_ADDRESS else None


def unpack_plan(text: str) -> Plan:
    """Read the plan in an address.

    Raises:
        PlanError: The text is not a plan from `pack_plan`.
    """
    if len(text) > _LONGEST_ADDRESS:
        raise PlanError(f"The plan in the address is longer than {_LONGEST_ADDRESS} characters.")
    try:
        packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        toml = unpacker.decompress(packed, _LONGEST_PLAN)
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise PlanError("The plan in the address is cut off or too long.")
        return Plan.from_toml(toml.decode())
    except (binascii.Error, zlib.error, ValueError) as error:
        raise PlanError(
            "The plan in the address cannot be read. Expected one that this dashboard wrote. Copy "
            "the whole address."
        ) from error
