"""The engine process, its IPython kernel and shell, and the requests that they answer."""
