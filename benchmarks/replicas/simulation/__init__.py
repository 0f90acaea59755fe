"""Many replicas as discrete events, with service times measured on one."""
