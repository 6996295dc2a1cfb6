"""Byte counts for people."""

GB_BYTES = 1 << 30
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float) -> str:
    """A byte count with its unit: 1536 becomes "1.5 KiB"."""
    for unit in _UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_UNITS[-1]}"
