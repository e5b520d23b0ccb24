"""The dialogue between the user and ranks that ask: ``input()``, ``getpass`` and debuggers."""
