"""What only eval.py needs: answers, metrics, the report and its page. Imports sft, never the other way."""
