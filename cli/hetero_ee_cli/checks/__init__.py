"""What `hetero-ee doctor` looks at: each check is a function that returns a finding."""
