"""The mixture-of-experts transformer, with experts that are trained here and experts that are frozen here."""
