"""What stands behind each command of `rekindle`: one file a command, and the numbers that they share."""
