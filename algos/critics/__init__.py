"""Algorithms whose critics of chunks choose, edit or weigh what a generative policy samples."""
