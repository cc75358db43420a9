"""Local samples: files, arrays and images. They stay on the device."""
