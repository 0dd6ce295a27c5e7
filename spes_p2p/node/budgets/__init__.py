"""What a volunteer lets a node take: rates, bytes a month, hours, idle machine only, battery, GPU share and power."""
