"""What stages that quantize share."""
