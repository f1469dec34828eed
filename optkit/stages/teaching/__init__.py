"""What stages that train a student share."""
