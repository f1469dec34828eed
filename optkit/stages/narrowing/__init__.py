"""What stages that make a model narrower or shallower share."""
