"""Settings, each declared once."""
