"""What of optkit can run on this machine."""
