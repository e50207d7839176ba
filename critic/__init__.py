"""What judges."""
