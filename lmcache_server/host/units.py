"""Byte counts for people."""

GB_BYTES = 1 << 30


def size(num_bytes: float) -> str:
    """A byte count with its unit: 1536 becomes "1.5 KiB"."""
    power = min(int(num_bytes).bit_length() - 1, 40) // 10 if num_bytes >= 1 else 0
    return f"{num_bytes / 1024**power:.{min(power, 1)}f} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
