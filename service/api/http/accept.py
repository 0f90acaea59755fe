"""Headers such as ``Accept``: the values that a client takes, with their weights."""

from __future__ import annotations

from email.message import Message


def weights(header: str) -> dict[str, float]:
    """The values of ``header`` in lower case, each with its weight: 1 at most, 0 for one that is refused (RFC 9110,
    section 12.4.2). A weight that is no number refuses its value."""
    found = {}
    for part in header.split(","):
        message = Message()
        message["Accept"] = part
        (value, _), *parameters = message.get_params([("", "")], "accept")
        weight = next((given for name, given in parameters if name.lower() == "q"), "1")
        try:
            found[value.strip().lower()] = min(max(float(weight), 0.0), 1.0)
        except ValueError:
            found[value.strip().lower()] = 0.0
    return found
