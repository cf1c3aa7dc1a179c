"""Features that a private training can have, a folder or a file each."""
