"""The hit rates that more or less memory would have had."""
