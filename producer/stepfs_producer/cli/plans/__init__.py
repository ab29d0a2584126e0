"""What the commands about plans do: `check_report` looks at one, `simulate_plan` plans its first steps."""
