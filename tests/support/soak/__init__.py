"""The soak: a real server, clients that come, work, fail, go and are killed, and what it costs the server."""
