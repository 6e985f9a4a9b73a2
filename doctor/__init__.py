"""What doctor.py knows: checks of a machine, collectives, known failures, memory. Imports sft, never the other way."""
