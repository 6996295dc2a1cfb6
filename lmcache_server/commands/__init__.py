"""The command `lmcache`. The one room that may import everything."""
