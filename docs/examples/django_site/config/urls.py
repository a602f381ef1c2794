"""URL patterns of the views."""

from django.urls import path

from api import views

urlpatterns = [
    path("titles", views.submit),
    path("titles/<str:job_id>", views.result),
    path("stories", views.story),
    path("stories/<str:job_id>/events", views.follow),
]
