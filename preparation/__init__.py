"""What data_prep.py needs beyond sft/: files of rows, dialogues, workers, held-out rows."""
