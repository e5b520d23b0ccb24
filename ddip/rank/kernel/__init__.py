"""The engine process with its IPython kernel and shell, and the requests that it answers."""
