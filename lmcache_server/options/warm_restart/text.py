"""What `lmcache doctor` reads of the running server's configuration."""

from lmcache_server.commands.control import json_object

REPORT = {"config": json_object("l1_path", "")}
