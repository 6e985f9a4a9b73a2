"""What only train.py needs: its inputs, what learns, the watchdog, the results. Imports sft, never the other way."""
