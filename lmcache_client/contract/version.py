"""The version of this project, the same for the server and the connector."""

VERSION = "0.1.0"
