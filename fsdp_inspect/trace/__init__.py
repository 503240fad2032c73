"""What a recorded run is: pure data and interval algebra; no files, no torch."""
