"""What stages that prune share."""
