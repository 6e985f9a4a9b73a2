"""What make needs beside the five scripts: the demo's model, wheels for offline machines, warm starts for tests."""
