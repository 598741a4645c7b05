"""What drafting will bring before anything is deployed: teacher-forced passes, their replay, times and prices."""
