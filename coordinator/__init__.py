"""What runs on the server: it decides, it never trains."""
