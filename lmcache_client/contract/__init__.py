"""What the connector and the server agree on; imports nothing else of this project."""
