"""What people, probes and monitoring ask of a running server, over HTTP."""
