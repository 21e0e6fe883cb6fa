"""Tasks, one file or folder per simulator family, each with its expert and figures."""
