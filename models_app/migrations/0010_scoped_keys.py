from django.db import migrations, models


def keep_scopes(apps, schema_editor):
    """Keys that name models are good for these only. May run again."""
    keys = apps.get_model('models_app', 'ApiKey')
    named = keys.allowed_models.through.objects.values('apikey_id')
    keys.objects.filter(pk__in=named).update(is_scoped=True)


class Migration(migrations.Migration):

    dependencies = [
        ('models_app', '0009_memory_growth'),
    ]

    operations = [
        migrations.AddField(
            model_name='apikey',
            name='is_scoped',
            field=models.BooleanField(default=False, editable=False, help_text='Good for the chosen models only, also when none of them is left.'),
        ),
        migrations.RunPython(keep_scopes, migrations.RunPython.noop, elidable=True),
    ]
