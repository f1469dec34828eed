"""What commands other than `run` show: doctor, profile, roofline, sensitivity."""
