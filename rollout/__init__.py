"""What generates."""
