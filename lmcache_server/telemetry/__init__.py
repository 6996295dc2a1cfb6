"""What is counted, where things happen."""
